"""What each call does: arguments checked, laid out as blocks, given to the engine or a library."""
