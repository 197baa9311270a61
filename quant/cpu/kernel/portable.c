/* Plain C for any processor. */
#define NAME(f) f##_portable
#include "_kernel.h"
const kernel kernel_portable = {"portable", lookup_portable, quantize_portable, place_portable,
                                resolve_portable};
