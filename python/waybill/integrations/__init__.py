"""Interfaces of other libraries, served by Waybill: programs that speak them need no change.

Nothing of this is imported by the rest of the package, and nothing is installed unless asked for.
"""
