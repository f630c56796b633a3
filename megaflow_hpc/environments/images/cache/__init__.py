"""Image cache of one node: unpacked copies on local scratch, shared by all processes of the user, within a budget.

:class:`~.cache.ImageCache` leases the unpacked trees of an image. Leased copies stay; other copies are evicted to make
room. ``manifest`` lists the images of a campaign, so that they can be carried to an air-gapped site. Sandboxes and the
``images`` commands call this package.
"""
