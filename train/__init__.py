"""The drafter: its model, its training from a run, and what comes of it: checkpoints, evaluation, export."""
