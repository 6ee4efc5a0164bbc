"""Types of the native core (native/bindings.cc)."""
