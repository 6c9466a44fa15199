"""The contract between an environment's author and Atropos, the bundled environments, and where author code runs.

Authors import from `atropos` itself; the rest of the project imports from the modules here.
"""
