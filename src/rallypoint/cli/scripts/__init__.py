"""The kinds of script that `rallypoint script` prints, a module for each."""
