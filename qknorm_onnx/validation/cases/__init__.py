"""The inputs on which a model is judged, made from what each input means."""
