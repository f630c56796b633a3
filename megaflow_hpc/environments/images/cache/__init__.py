"""Image cache of one node: unpacked copies on local scratch, shared by all processes of the user.

:class:`~.cache.ImageCache` leases the unpacked trees of an image. Copies without a lease are evicted when they exceed
the budget. ``manifest`` lists the images of a campaign, so that they can be carried to an air-gapped site. Sandboxes
and the ``images`` commands call this package.
"""
