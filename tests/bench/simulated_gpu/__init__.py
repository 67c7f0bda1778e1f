"""A simulated GPU for vLLM: the real engine, in which the forward pass sleeps for a modelled time.

Scheduler, KV cache manager, tokenizer and front end are vLLM's own. ``profiles`` models the time of one step,
``worker`` is the class that vLLM loads, ``device_report`` counts what the device does. No image contains this package.
"""
