"""The configuration keys of verl, in terms of scalerl's: `table.yaml` has the rows, `translator` applies them."""

from scalerl.extras.verl.keys.translator import Translator

__all__ = ["Translator"]
