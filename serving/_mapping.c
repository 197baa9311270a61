/* Memory of a file that another process may truncate, mapped so that a page that is gone ends nobody.
 *
 * map(fd, offset, size) -> a writable buffer of `size` bytes of a file from byte `offset` on, shared; OSError: it cannot be mapped
 *   .is_whole: whether every page that was read or written was there
 *
 * A read or write of a mapped page behind a file's end, or of one for which there is no memory, is a SIGBUS. The handler here puts
 * empty memory of this process in the page's place, and in that of all behind it, notes that the mapping is not whole, and the read or
 * write goes on. What it gave is worth nothing then; whoever asks looks at `is_whole` after it, and maps the file anew. A SIGBUS of
 * any other address goes to the handler that was there before.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* The first page of a place and its count of pages in one word, so that the handler never reads one without the other; 0: free. */
enum { PLACES = 4096, COUNT_BITS = 28 };
typedef struct { _Atomic uint64_t pages; atomic_int is_torn; } place;
static place places[PLACES];
static uintptr_t page_bytes;
static struct sigaction before;

typedef struct {
    PyObject_HEAD
    place *at;
    char *pages; /* where the mapping begins */
    size_t mapped, skipped; /* bytes of the pages, and those of them before the buffer */
    Py_ssize_t size;
} mapping;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const int error = errno;
    const uint64_t page = (uintptr_t)info->si_addr / page_bytes;
    for (int i = 0; i < PLACES; i++) {
        const uint64_t pages = atomic_load(&places[i].pages), first = pages >> COUNT_BITS, end = first + (pages & ((1u << COUNT_BITS) - 1));
        if (page < first || page >= end) continue;
        void *there = (void *)(uintptr_t)(page * page_bytes); /* the handler's thread is inside the mapping, so it stays */
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        if (mmap(there, (end - page) * page_bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) break;
        atomic_store(&places[i].is_torn, 1);
        errno = error;
        return;
    }
    errno = error;
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
    else sigaction(number, &before, NULL); /* the instruction runs again, and ends the process */
}

static int install(void) {
    static int is_installed;
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (is_installed) return 1;
    sigemptyset(&ours.sa_mask);
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (sigaction(SIGBUS, NULL, &before) || sigaction(SIGBUS, &ours, NULL)) return 0;
    return is_installed = 1;
}

static PyObject *map(PyObject *module, PyObject *args) {
    int fd;
    long long offset;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "iLn", &fd, &offset, &size)) return NULL;
    if (offset < 0 || size < 1) {
        PyErr_Format(PyExc_ValueError, "offset %lld, size %zd; expected an offset from 0 and a size from 1", offset, size);
        return NULL;
    }
    if (!install()) return PyErr_SetFromErrno(PyExc_OSError);
    PyTypeObject *type = PyModule_GetState(module) ? *(PyTypeObject **)PyModule_GetState(module) : NULL;
    mapping *m = type ? (mapping *)PyType_GenericAlloc(type, 0) : NULL;
    if (!m) return NULL;
    m->skipped = (size_t)((uint64_t)offset % page_bytes), m->size = size;
    m->mapped = (m->skipped + (size_t)size + page_bytes - 1) / page_bytes * page_bytes;
    if (m->mapped / page_bytes >> COUNT_BITS) errno = ENOMEM, m->pages = MAP_FAILED;
    else m->pages = mmap(NULL, m->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset - (off_t)m->skipped);
    if (m->pages == MAP_FAILED) {
        m->pages = NULL;
        Py_DECREF(m);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    const uint64_t pages = (uint64_t)((uintptr_t)m->pages / page_bytes) << COUNT_BITS | m->mapped / page_bytes;
    for (int i = 0; i < PLACES && !m->at; i++) {
        uint64_t none = 0;
        if (atomic_load(&places[i].pages)) continue;
        atomic_store(&places[i].is_torn, 0); /* callers hold the interpreter's lock, so the place is still free */
        if (atomic_compare_exchange_strong(&places[i].pages, &none, pages)) m->at = places + i;
    }
    if (m->at) return (PyObject *)m;
    Py_DECREF(m);
    errno = EMFILE;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static void dealloc(PyObject *self) {
    mapping *m = (mapping *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (m->at) atomic_store(&m->at->pages, 0); /* first, as the pages may be another's at once */
    if (m->pages) munmap(m->pages, m->mapped);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    mapping *m = (mapping *)self;
    return PyBuffer_FillInfo(view, self, m->pages + m->skipped, m->size, 0, flags);
}

static PyObject *is_whole(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(!atomic_load(&((mapping *)self)->at->is_torn));
}

static PyGetSetDef fields[] = {{"is_whole", is_whole, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc}, {Py_bf_getbuffer, get_buffer}, {Py_tp_getset, fields}, {0, NULL}};
static PyType_Spec spec = {
    "tableside.serving._mapping.Mapping", sizeof(mapping), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

static PyMethodDef methods[] = {{"map", map, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_mapping", NULL, sizeof(PyObject *), methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__mapping(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    PyObject *type = PyType_FromSpec(&spec);
    if (!type || PyModule_AddObjectRef(made, "Mapping", type)) {
        Py_XDECREF(type);
        Py_DECREF(made);
        return NULL;
    }
    *(PyObject **)PyModule_GetState(made) = type; /* for as long as the module, which is never unloaded */
    return made;
}
