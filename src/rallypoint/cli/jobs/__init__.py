"""What the commands about running jobs share: selecting a job, and printing tables."""
