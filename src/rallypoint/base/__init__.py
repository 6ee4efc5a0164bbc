"""What launcher and worker share. The lowest room: it imports nothing of the others."""
