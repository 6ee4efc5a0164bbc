"""What the commands about running jobs share: which one is meant, and how it is told."""
