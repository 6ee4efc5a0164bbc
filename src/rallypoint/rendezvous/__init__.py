"""Who takes part in a job's next round: how nodes find each other, and which ranks they get."""
