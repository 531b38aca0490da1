"""What happens inside a model and inside its module: values of the one, results of the other's parts."""
