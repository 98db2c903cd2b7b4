"""Rules between keys. A module exports lists of `Rule`, functions that make them for a section, and nothing else.

`commands` has the rules of each command; what a model allows of a layout is in `config.layout_checks`.
"""
