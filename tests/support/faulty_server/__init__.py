"""The server with a fault in one of its engines, switched on and off while it runs.

Everything but the fault is real: the engines, the gateway, the store, jobs and adapters. A fault
is a name in the file that ``FAULT_FILE`` points to; an empty file is a healthy server.
"""
