/* A vision transformer whose adder layers and attention scores are sums of absolute differences of
 * bytes. C99 and libm, no allocation.
 *
 *     cc -O3 -o classify model.c -lm
 *     ./classify model.bin < IMAGES
 *
 * IMAGES are bytes: ROWS x COLUMNS x CHANNELS of each image, row by row, one image after the other.
 * For each image a line: the class, counted from 0, and the logits of all.
 *
 * An adder layer compares its inputs x with prototypes w: y[o] = -sum over k of |x[k] - w[k][o]|.
 * Both are rounded to numbers lowest + step * byte, so the sum is one of integers, times step. What
 * lies beyond the largest or smallest of these numbers is clamped; for the weights that takes a
 * constant from each output, `excess`, which is added again. For the inputs it takes the same from
 * all outputs, which the LayerNorm behind takes off anyway.
 *
 * With LIBRARY defined there is no main: a program that includes this file fills `model`, asks
 * `check` and calls `classify`, which leaves in `looks` what each head looked at.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* SIZES */

#define GRID_ROWS (ROWS / PATCH)
#define GRID_COLUMNS (COLUMNS / PATCH)
#define PATCHES (GRID_ROWS * GRID_COLUMNS)
#define TOKENS (PREFIX + PATCHES)
#define PIXELS (PATCH * PATCH * CHANNELS)
#define HEAD (WIDTH / HEADS)

/* Between two sums. Where double is slow, float does: some more bytes then differ from JAX's. */
typedef double real;

/* The weights file is this struct, little-endian; every part of it takes a multiple of 4 bytes. */

typedef struct {
    float lowest, step;
} Grid;

typedef struct {
    float scale[WIDTH], bias[WIDTH];
} Norm;

#define ADDER_LAYER(inputs, outputs)                              \
    struct {                                                      \
        Grid grid;                                                \
        float excess[outputs], scale[outputs], bias[outputs];     \
        uint8_t weight[((inputs) * (outputs) + 3) / 4 * 4];       \
    }

typedef struct {
    Norm norm1;
    ADDER_LAYER(WIDTH, WIDTH) query, key, value, out;
    Grid score[HEADS];
    float score_factor[HEADS];
    Norm norm2;
    ADDER_LAYER(WIDTH, HIDDEN) fc1;
    ADDER_LAYER(HIDDEN, WIDTH) fc2;
} Block;

typedef struct {
    char magic[8];
    uint32_t sizes[SIZES_COUNT], checksum;
    float mean[CHANNELS], deviation[CHANNELS];
    float patch[PIXELS][WIDTH], patch_bias[WIDTH];
    float prefix[PREFIX + !PREFIX][WIDTH], position[TOKENS][WIDTH];
    Block block[DEPTH];
    Norm norm;
    float head[WIDTH][CLASSES], head_bias[CLASSES];
} Model;

static Model model;

/* The weights that each head gives each token for what the class is read from: the row of the
 * class token, or with MEAN_POOLING the mean of the patches' rows. */
static real looks[DEPTH][HEADS][TOKENS];

typedef char no_gap_in_model[sizeof(Model) == MODEL_BYTES ? 1 : -1];

/* Returns the sum of |a[k] - b[k]|: the one loop that takes the time. Compilers know it, in this
 * form, as psadbw. */
static int32_t distance(const uint8_t *a, const uint8_t *b, int length)
{
    int32_t sum = 0;
    for (int k = 0; k < length; k++)
        sum += abs(a[k] - b[k]);
    return sum;
}

/* In float, as JAX has it. */
static void quantize(const real *x, uint8_t *bytes, int length, Grid grid)
{
    const float inverse = 1 / grid.step;
    for (int k = 0; k < length; k++) {
        float steps = rintf(((float)x[k] - grid.lowest) * inverse);
        bytes[k] = (uint8_t)(steps > LEVELS ? LEVELS : steps > 0 ? steps : 0);
    }
}

static void normalize(real *x, const float *scale, const float *bias, int length, real epsilon)
{
    real mean = 0, variance = 0;
    for (int k = 0; k < length; k++)
        mean += x[k];
    mean /= length;
    for (int k = 0; k < length; k++)
        variance += (x[k] - mean) * (x[k] - mean);
    real factor = 1 / sqrt(variance / length + epsilon);
    for (int k = 0; k < length; k++)
        x[k] = (x[k] - mean) * factor * scale[k] + bias[k];
}

/* One row of an adder layer and the LayerNorm behind it. */
static void adder(const real *x, real *y, int inputs, int outputs, Grid grid, const float *excess,
                  const float *scale, const float *bias, const uint8_t *weight)
{
    static uint8_t bytes[WIDTH > HIDDEN ? WIDTH : HIDDEN];
    quantize(x, bytes, inputs, grid);
    for (int o = 0; o < outputs; o++)
        y[o] = -((real)distance(bytes, weight + o * inputs, inputs) * grid.step + excess[o]);
    normalize(y, scale, bias, outputs, ADDER_EPSILON);
}

#define ADDER(layer, x, y, inputs, outputs)                                                 \
    adder(x, y, inputs, outputs, (layer).grid, (layer).excess, (layer).scale, (layer).bias, \
          (layer).weight)

/* y[i] = sum over j of softmax_j(factor * score(q[i], k[j])) v[j], and v[i] where IDENTITY. */
static void attend(real query[TOKENS][WIDTH], real key[TOKENS][WIDTH], real value[TOKENS][WIDTH],
                   real output[TOKENS][WIDTH], const Block *block, real look[HEADS][TOKENS])
{
    static uint8_t queries[TOKENS][HEAD], keys[TOKENS][HEAD];
    static real excess[TOKENS], weight[TOKENS];
    for (int head = 0; head < HEADS; head++) {
        const int first = head * HEAD;
        const Grid grid = block->score[head];
        const real highest = grid.lowest + grid.step * LEVELS;
        for (int i = 0; i < TOKENS; i++) {
            quantize(query[i] + first, queries[i], HEAD, grid);
            quantize(key[i] + first, keys[i], HEAD, grid);
            excess[i] = 0;
            for (int c = first; c < first + HEAD; c++) {
                real k = key[i][c];
                excess[i] += k > highest ? k - highest : k < grid.lowest ? grid.lowest - k : 0;
            }
        }
        for (int i = 0; i < TOKENS; i++) {
            real largest = -INFINITY, sum = 0;
            for (int j = 0; j < TOKENS; j++) {
                real far = (real)distance(queries[i], keys[j], HEAD) * grid.step + excess[j];
                weight[j] = -far * block->score_factor[head];
                largest = weight[j] > largest ? weight[j] : largest;
            }
            for (int j = 0; j < TOKENS; j++) {
                weight[j] = exp(weight[j] - largest);
                sum += weight[j];
            }
            const real share = MEAN_POOLING ? (real)(i >= PREFIX) / PATCHES : i == 0;
            for (int j = 0; j < TOKENS && share > 0; j++)
                look[head][j] += share * weight[j] / sum;
            for (int c = first; c < first + HEAD; c++) {
                real mixed = 0;
                for (int j = 0; j < TOKENS; j++)
                    mixed += weight[j] * value[j][c];
                output[i][c] = mixed / sum + (IDENTITY ? value[i][c] : 0);
            }
        }
    }
}

static void apply_block(real token[TOKENS][WIDTH], const Block *block, real look[HEADS][TOKENS])
{
    static real query[TOKENS][WIDTH], key[TOKENS][WIDTH], value[TOKENS][WIDTH];
    static real mixed[TOKENS][WIDTH], row[WIDTH], hidden[HIDDEN];
    for (int i = 0; i < TOKENS; i++) {
        memcpy(row, token[i], sizeof row);
        normalize(row, block->norm1.scale, block->norm1.bias, WIDTH, EPSILON);
        ADDER(block->query, row, query[i], WIDTH, WIDTH);
        ADDER(block->key, row, key[i], WIDTH, WIDTH);
        ADDER(block->value, row, value[i], WIDTH, WIDTH);
    }
    attend(query, key, value, mixed, block, look);
    for (int i = 0; i < TOKENS; i++) {
        ADDER(block->out, mixed[i], row, WIDTH, WIDTH);
        for (int c = 0; c < WIDTH; c++)
            token[i][c] += row[c];
        memcpy(row, token[i], sizeof row);
        normalize(row, block->norm2.scale, block->norm2.bias, WIDTH, EPSILON);
        ADDER(block->fc1, row, hidden, WIDTH, HIDDEN);
        for (int c = 0; c < HIDDEN; c++) /* GELU */
            hidden[c] = hidden[c] * (1 + erf(hidden[c] * sqrt(0.5))) / 2;
        ADDER(block->fc2, hidden, row, HIDDEN, WIDTH);
        for (int c = 0; c < WIDTH; c++)
            token[i][c] += row[c];
    }
}

static void embed(const uint8_t *image, real token[TOKENS][WIDTH])
{
    for (int i = 0; i < PREFIX; i++)
        for (int c = 0; c < WIDTH; c++)
            token[i][c] = model.prefix[i][c];
    for (int patch = 0; patch < PATCHES; patch++) {
        real *row = token[PREFIX + patch];
        const int top = patch / GRID_COLUMNS * PATCH, left = patch % GRID_COLUMNS * PATCH;
        for (int c = 0; c < WIDTH; c++)
            row[c] = model.patch_bias[c];
        for (int pixel = 0; pixel < PIXELS; pixel++) {
            const int channel = pixel % CHANNELS, place = pixel / CHANNELS;
            const int y = top + place / PATCH, x = left + place % PATCH;
            real shown = (real)image[(y * COLUMNS + x) * CHANNELS + channel] / 255;
            shown = (shown - model.mean[channel]) / model.deviation[channel];
            for (int c = 0; c < WIDTH; c++)
                row[c] += shown * model.patch[pixel][c];
        }
    }
    for (int i = 0; i < TOKENS; i++)
        for (int c = 0; c < WIDTH; c++)
            token[i][c] += model.position[i][c];
}

static void classify(const uint8_t *image, real logits[CLASSES])
{
    static real token[TOKENS][WIDTH], pooled[WIDTH];
    embed(image, token);
    memset(looks, 0, sizeof looks);
    for (int number = 0; number < DEPTH; number++)
        apply_block(token, &model.block[number], looks[number]);
    for (int i = 0; i < TOKENS && !FC_NORM; i++)
        normalize(token[i], model.norm.scale, model.norm.bias, WIDTH, EPSILON);
    memcpy(pooled, token[0], sizeof pooled);
    for (int c = 0; c < WIDTH && MEAN_POOLING; c++) {
        pooled[c] = 0;
        for (int i = PREFIX; i < TOKENS; i++)
            pooled[c] += token[i][c] / PATCHES;
    }
    if (FC_NORM)
        normalize(pooled, model.norm.scale, model.norm.bias, WIDTH, EPSILON);
    for (int class = 0; class < CLASSES; class++) {
        logits[class] = model.head_bias[class];
        for (int c = 0; c < WIDTH; c++)
            logits[class] += pooled[c] * model.head[c][class];
    }
}

/* CRC-32 of all that lies behind the checksum. */
static uint32_t checksum(void)
{
    const uint8_t *bytes = (const uint8_t *)model.mean, *end = (const uint8_t *)(&model + 1);
    uint32_t sum = 0xFFFFFFFF;
    for (; bytes < end; bytes++) {
        sum ^= *bytes;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (0xEDB88320 & -(sum & 1));
    }
    return ~sum;
}

/* Returns NULL, or what is wrong with the weights. */
static const char *check(void)
{
    static const uint32_t sizes[SIZES_COUNT] = {SIZES_LIST};
    if (memcmp(model.magic, "ADDER8C1", 8) || memcmp(model.sizes, sizes, sizeof sizes))
        return "weights of this network on a little-endian processor, got others";
    if (model.checksum != checksum())
        return "the bytes that were written, got damaged ones";
    return NULL;
}

#ifndef LIBRARY
#include <stdio.h>

static const char *load(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return "a readable file, got none";
    size_t whole = fread(&model, sizeof model, 1, file);
    int rest = fgetc(file);
    fclose(file);
    if (whole != 1 || rest != EOF)
        return "as many bytes as this network's weights have, got others";
    return check();
}

int main(int count, char **arguments)
{
    static uint8_t image[ROWS * COLUMNS * CHANNELS];
    static real logits[CLASSES];
    if (count != 2) {
        fprintf(stderr, "expected one weights file and images on the standard input\n");
        return 2;
    }
    const char *wrong = load(arguments[1]);
    if (wrong) {
        fprintf(stderr, "%s: expected %s; export it again\n", arguments[1], wrong);
        return 1;
    }
    size_t got;
    while ((got = fread(image, 1, sizeof image, stdin)) == sizeof image) {
        int best = 0;
        classify(image, logits);
        for (int class = 1; class < CLASSES; class++)
            best = logits[class] > logits[best] ? class : best;
        printf("%d", best);
        for (int class = 0; class < CLASSES; class++)
            printf(" %.9g", (double)logits[class]);
        printf("\n");
    }
    if (got) {
        fprintf(stderr, "expected images of %zu bytes, got %zu at the end\n", sizeof image, got);
        return 1;
    }
    return 0;
}
#endif
