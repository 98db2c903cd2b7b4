"""The configuration keys of verl, in terms of scalerl's: `vocabulary` has the table, `translation` applies it."""

from scalerl.config.verl.translation import Translation, Translator, translation_table

__all__ = ["Translation", "Translator", "translation_table"]
