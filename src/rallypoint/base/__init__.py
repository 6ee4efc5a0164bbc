"""What launcher and worker share. This is the lowest room: it imports no other."""
