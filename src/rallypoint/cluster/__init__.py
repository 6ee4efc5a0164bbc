"""What a job must know about the machines around it, above all which address reaches which host."""
