"""What a person sees of a running service: state, samples, metrics, progress."""
