"""A helper process for native code that can hang, crash or leak. (contract; see docs/design.md)

class Child:
    Child(argv, *, deadline_s, memory_gb, recycle_after, name)
    child.call(request, deadline_s=None) -> reply
        request, reply: picklable dicts of plain values and numpy arrays
        raises DeadlineExceeded, MemoryCapExceeded, ChildDied (which name the helper and the limit), or the
        extractors.errors class that the helper reported
    child.close()

serve(function): the helper's side: reads requests, calls function(request), writes replies. Frames are 8 bytes of length
(little endian) and a protocol-5 pickle. Replies travel on a private copy of fd 1; fd 1 itself is pointed at fd 2 first, so that what a
library prints can't damage a frame. Errors travel as {"error": class name, "text": ..., "traceback": ...}.
The helper dies with its parent (PR_SET_PDEATHSIG).
"""
