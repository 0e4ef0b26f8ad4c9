"""Running inside other people's evaluation harnesses; each is imported in its own file only.

`options`, `dialogue`, `figures` and `loading` are what they share. `manifest` is what lmms-eval
finds, `lmms_eval` the model that it then loads, `vlmeval` the model and the runner for VLMEvalKit.
"""
