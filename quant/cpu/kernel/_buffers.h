/* The memory of arguments that Python gives, for all extensions. */
#pragma once
#include <Python.h>

static inline void release_buffers(Py_buffer *held, int count) {
    while (count--) PyBuffer_Release(held + count);
}

/* Takes the buffers of `count` arguments; bit n of `writable`: the n-th is written. 0: an error is set, none is held. */
static inline int hold_buffers(PyObject *const *args, int count, unsigned writable, Py_buffer *held) {
    for (int i = 0; i < count; i++) {
        if (!PyObject_GetBuffer(args[i], held + i, writable >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) continue;
        release_buffers(held, i);
        return 0;
    }
    return 1;
}
