"""The artifact cache: content keys, the store on disk, bundles, maintenance and parallel builds.

Imported as ``kernelgen.cache``. Nothing here touches the disk at import; ``docs/design/cache.md`` has the layout and
the reason for every part of a key.
"""
