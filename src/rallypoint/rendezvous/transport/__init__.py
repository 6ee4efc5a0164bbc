"""How agents communicate: authenticated connections for one selector, frames, messages as bytes."""
