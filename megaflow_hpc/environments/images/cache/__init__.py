"""The images of one node: copies on its scratch, shared by all processes of the user, within a budget.

:class:`~.cache.ImageCache` returns leases on the unpacked trees of an image. Leased copies stay; others are removed for
what is needed next. ``manifest`` lists the images of a campaign, to be carried to where nothing can be fetched.
Sandboxes and the ``images`` verbs call.
"""
