"""The configuration keys of verl, in terms of scalerl's: `vocabulary` has the table, `translation` applies it."""

from scalerl.extras.verl.keys.translation import Translator

__all__ = ["Translator"]
