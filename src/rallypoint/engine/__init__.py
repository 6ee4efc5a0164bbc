"""The Python face of the native engine: communicators and the memory they share."""
