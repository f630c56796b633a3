"""Other projects' trainers drink from the dataflow: in come its steps, out go batches in the form that each takes.

Every bridge names the version of the project that it was written against. None of them is imported by anything here.
"""
