"""Measuring a model once: where its keys lie and where its queries look (`moments`), and what errors cost (`costs`).

`rotary` asks the model how it turns keys, `metric` holds the arithmetic, `tap` shows each layer's tensors, `passes` are
the forwards and backwards. `used` chooses the moments that a cache takes.
"""
