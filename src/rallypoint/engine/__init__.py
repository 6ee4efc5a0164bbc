"""The Python interface of the native engine: communicators and the memory that they share."""
