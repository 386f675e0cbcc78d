"""The embedded worlds: data made by grammars whose truth is known, and small models trained on
them.
"""
