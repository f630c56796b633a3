"""The images of one node: copies on its scratch, shared by all processes of the user, within a budget.

:class:`~.cache.ImageCache` gets a file of the store and returns a lease on its unpacked trees; what is leased
stays, other copies give way to what is needed next (``prefetch``). ``manifest`` lists the images of a campaign, to be
carried where nothing can be fetched. Sandboxes call, and the ``images`` verbs.
"""
