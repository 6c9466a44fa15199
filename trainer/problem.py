"""What goes wrong in training, told to a person."""


class TrainerProblem(Exception):
    """One sentence: what cannot be trained, loaded or kept, and what to do. What was in memory is as it was before."""
