"""What each call does: check arguments, lay out blocks, pass them to the engine or a library."""
