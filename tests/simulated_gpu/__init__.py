"""A GPU that is not there: whole calls run "on cuda" in one process.

It counts what a GPU would be given (kernels, messages, bytes alive) and finds what would go wrong there: tensors on
other devices, waits of the host for the device, and messages whose memory is used or freed while they are under way.
Kernels themselves, their times and fragmentation of memory are not simulated.
"""
