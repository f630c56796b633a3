"""Image cache of one node: unpacked images on local scratch, shared by all processes of the user.

:class:`~.cache.ImageCache` leases the unpacked trees of an image. When the cache exceeds its budget, it evicts entries
without a lease. ``manifest`` lists a campaign's images, so that they can be transferred to an air-gapped site.
Sandboxes and the ``images`` commands call this package.
"""
