"""What quantized caches cost in quality: `python -m benchmarks.quality --model FOLDER`.

A real model reads the same text with every cache, and its predictions are compared with those it makes with the exact
`DynamicCache`. Needs a model whose layers are all full attention.
"""
