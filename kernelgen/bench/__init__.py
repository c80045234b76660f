"""Timing by one protocol: kernelgen and every installed peer, interleaved in one process run, written as JSON.

``kernelgen bench`` is the front; docs/ is made from the JSON files it writes. Nothing here is imported by a call.
"""
