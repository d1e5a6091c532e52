/* model.c for a browser: WebAssembly has no C library, so what model.c asks of one is here, or
 * comes from JavaScript. */
#include <stddef.h>

double exp(double), erf(double);
#define sqrt __builtin_sqrt
#define rintf __builtin_rintf
#define abs __builtin_abs
#define memcpy __builtin_memcpy
#define memset __builtin_memset
#define INFINITY __builtin_inff()

static int memcmp(const void *a, const void *b, size_t length)
{
    const unsigned char *x = a, *y = b;
    while (length && *x == *y)
        x++, y++, length--;
    return length ? *x - *y : 0;
}

#define LIBRARY
#include "model.c"

#define CALLED(name) __attribute__((export_name(#name)))
static uint8_t image[ROWS * COLUMNS * CHANNELS];
static real logits[CLASSES];

CALLED(size) size_t size(void) { return sizeof model; }
CALLED(classes) int classes(void) { return CLASSES; }
CALLED(weights) void *weights(void) { return &model; }
CALLED(fault) const char *fault(void) { return check(); }
CALLED(pixels) void *pixels(void) { return image; }
CALLED(answer) void *answer(void) { return classify(image, logits), logits; }
CALLED(maps) void *maps(void) { return looks; }
