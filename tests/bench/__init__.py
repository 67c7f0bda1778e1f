"""Benchmarks: the same files through vLLM's own runners, ray.data.llm and cloister, on a simulated GPU or this machine.

``cases`` lists what is measured, ``bars`` what the figures must reach, ``workloads`` the files, ``runners`` who reads
them. ``simulated_gpu`` is the device.
"""
