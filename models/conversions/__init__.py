"""Rules tables, one per family: which tensor of a checkpoint goes where in our parameter tree."""
