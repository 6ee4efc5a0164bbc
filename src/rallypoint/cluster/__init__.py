"""What a job must know of the machines around it: which address reaches whom."""
