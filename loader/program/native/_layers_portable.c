/* Plain C for any processor. */
#define NAME(f) f##_portable
#include "_layers.h"
const layers_kernel layers_portable = {"portable", layer_portable, from_half_portable};
