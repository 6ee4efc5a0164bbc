"""How agents talk: authenticated connections for one selector, frames, and messages as bytes."""
