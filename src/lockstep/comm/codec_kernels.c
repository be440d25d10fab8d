/* The operations of integer_codec.py on a CPU, each in one pass. They return the same bits as the functions there: see
   Note [Exactness]. Blocks have BLOCK elements; codec_kernels.py compiles this file and calls it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t word __attribute__((aligned(1), may_alias)); /* eight bytes at any address */

#define BLOCK 128
#define NON_FINITE 255
#define SMALLEST_CODE 8
#define BIAS 128

/* The row of the dither table for a block: `dither_rows`. */
static const float *dither_row(const float *table, int64_t number, uint32_t key, int64_t rows) {
    uint32_t mixed = (uint32_t)number * 0x9E3779B1u + key;
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 16)) * 0xC2B2AE35u;
    return table + ((mixed ^ (mixed >> 13)) & (uint32_t)(rows - 1)) * BLOCK;
}

static float power_of_two(int32_t biased) {
    int32_t bits = biased << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The code of each block. The bits of a float without its sign have the order of the values, NaN last. With `more`, the
   maximum with what is in `codes`. */
void block_codes(const int32_t *gradient, uint8_t *codes, int64_t blocks, int bits, int more) {
    uint32_t largest = (1u << (bits - 1)) - 1, carry = (1u << 23) - 1 - ((largest << (25 - bits)) - (1u << 23));
    for (int64_t b = 0; b < blocks; b++) {
        int32_t found = 0;
        for (int j = 0; j < BLOCK; j++) {
            int32_t value = gradient[b * BLOCK + j] & 0x7fffffff;
            found = value > found ? value : found;
        }
        int32_t code = (int32_t)(((uint32_t)found + carry) >> 23) - (126 + bits - 1) + BIAS;
        code = code < SMALLEST_CODE ? SMALLEST_CODE : code >= NON_FINITE ? NON_FINITE - 1 : code;
        code = found == 0 ? 0 : found >= 0x7f800000 ? NON_FINITE : code;
        codes[b] = (uint8_t)(more && codes[b] > code ? codes[b] : code);
    }
}

/* Rounds a gradient. With `more`, adds to `sums`, whose type is INTEGER. */
#define ENCODE(NAME, INTEGER)                                                                                        \
    void NAME(const float *gradient, const uint8_t *codes, const int64_t *numbers, uint32_t key, const float *table, \
              int64_t rows, INTEGER *sums, int64_t blocks, int more) {                                               \
        for (int64_t b = 0; b < blocks; b++) {                                                                       \
            const float *x = gradient + b * BLOCK, *dither = dither_row(table, numbers[b], key, rows);               \
            float scale = codes[b] == 0 ? 0.0f : power_of_two(127 + BIAS - codes[b]);                                \
            INTEGER *out = sums + b * BLOCK;                                                                         \
            if (codes[b] == NON_FINITE)                                                                              \
                memset(out, 0, BLOCK * sizeof *out);                                                                 \
            else if (more)                                                                                           \
                for (int j = 0; j < BLOCK; j++) out[j] += (INTEGER)(int32_t)(dither[j] + x[j] * scale);              \
            else                                                                                                     \
                for (int j = 0; j < BLOCK; j++) out[j] = (INTEGER)(int32_t)(dither[j] + x[j] * scale);               \
        }                                                                                                            \
    }

ENCODE(encode_uint8, uint8_t)
ENCODE(encode_int16, int16_t)

/* Packed values consist of planes: the low bytes, if there are more than 8 bits, and then 4, 2 and 1 bits of each value,
   8 / width values to a byte, which are far apart. The loops below go over the values in slices in which the place of
   every plane is fixed, a few at a time, so that they stay in the nearest cache. Bytes are shifted eight at a time:
   nothing is shifted out of a byte that its mask would keep. */
#define FEW 1024

static int narrowest(int bits) { return bits % 8 == 0 ? 8 : bits & 1 ? 1 : bits & 2 ? 2 : 4; }

static uint64_t in_each_byte(int width) { return (uint64_t)((1 << width) - 1) * 0x0101010101010101u; }

/* out |= bytes << up, or out = bytes << up. */
static void put_bits(const uint64_t *bytes, uint8_t *out, int64_t count, int up, int more) {
    word *words = (word *)out;
    if (more)
        for (int64_t i = 0; i < count / 8; i++) words[i] |= bytes[i] << up;
    else
        for (int64_t i = 0; i < count / 8; i++) words[i] = bytes[i] << up;
}

#define PACK(NAME, INTEGER)                                                                                     \
    void NAME(const INTEGER *values, uint8_t *packed, int64_t numel, int bits) {                                \
        int slices = 8 / narrowest(bits);                                                                       \
        int64_t length = numel / slices;                                                                        \
        uint64_t cut[FEW / 8];                                                                                  \
        for (int64_t from = 0; from < length; from += FEW) {                                                    \
            int64_t few = length - from < FEW ? length - from : FEW;                                            \
            for (int slice = 0; slice < slices; slice++) {                                                      \
                const INTEGER *x = values + slice * length + from;                                              \
                uint8_t *plane = packed, *bytes = (uint8_t *)cut;                                               \
                int shift = 0;                                                                                  \
                if (bits >= 8) {                                                                                \
                    uint8_t *out = plane + slice * length + from;                                               \
                    for (int64_t i = 0; i < few; i++) out[i] = (uint8_t)x[i];                                   \
                    plane += numel, shift = 8;                                                                  \
                }                                                                                               \
                for (int width = 4; width; width /= 2) {                                                        \
                    if (!(bits % 8 & width)) continue;                                                          \
                    int together = slices / (8 / width), slot = slice / together;                               \
                    uint64_t mask = in_each_byte(width);                                                        \
                    if (sizeof *x == 1) {                                                                       \
                        for (int64_t i = 0; i < few / 8; i++) cut[i] = (((const word *)x)[i] >> shift) & mask;    \
                    } else {                                                                                    \
                        for (int64_t i = 0; i < few; i++) bytes[i] = (uint8_t)((uint16_t)x[i] >> shift);        \
                        for (int64_t i = 0; i < few / 8; i++) cut[i] &= mask;                                   \
                    }                                                                                           \
                    put_bits(cut, plane + (slice % together) * length + from, few, slot * width, slot > 0);     \
                    plane += numel * width / 8, shift += width;                                                 \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }

PACK(pack_uint8, uint8_t)
PACK(pack_int16, int16_t)

/* The inverse of `pack`; with `more`, adds to `values`. */
void unpack(const uint8_t *packed, int16_t *values, int64_t numel, int bits, int more) {
    int slices = 8 / narrowest(bits);
    int64_t length = numel / slices;
    uint64_t cut[FEW / 8];
    const uint8_t *bytes = (const uint8_t *)cut;
    for (int64_t from = 0; from < length; from += FEW) {
        int64_t few = length - from < FEW ? length - from : FEW;
        for (int slice = 0; slice < slices; slice++) {
            int16_t *to = values + slice * length + from;
            const uint8_t *plane = packed;
            int shift = 0, add = more;
            if (bits >= 8) {
                const uint8_t *x = plane + slice * length + from;
                if (add)
                    for (int64_t i = 0; i < few; i++) to[i] += x[i];
                else
                    for (int64_t i = 0; i < few; i++) to[i] = x[i];
                plane += numel, shift = 8, add = 1;
            }
            for (int width = 4; width; width /= 2) {
                if (!(bits % 8 & width)) continue;
                int together = slices / (8 / width), down = slice / together * width;
                const word *x = (const word *)(plane + (slice % together) * length + from);
                uint64_t mask = in_each_byte(width);
                int16_t factor = (int16_t)(1 << shift);
                for (int64_t i = 0; i < few / 8; i++) cut[i] = (x[i] >> down) & mask;
                if (add)
                    for (int64_t i = 0; i < few; i++) to[i] = (int16_t)(to[i] + bytes[i] * factor);
                else
                    for (int64_t i = 0; i < few; i++) to[i] = (int16_t)(bytes[i] * factor);
                plane += numel * width / 8, shift += width, add = 1;
            }
        }
    }
}

/* Rounds sums of integers with the offset `offset` to `bits` bits, each block shifted by as many bits as it needs. */
void round_sums(const int16_t *sums, int32_t offset, const int64_t *numbers, uint32_t key, const float *table,
                int64_t rows, uint8_t *values, uint8_t *shifts, int64_t blocks, int bits) {
    int32_t limit = (1 << (bits - 1)) - 1;
    for (int64_t b = 0; b < blocks; b++) {
        const int16_t *x = sums + b * BLOCK;
        const float *dither = dither_row(table, numbers[b], key, rows);
        int32_t found = 0, shift = 0;
        for (int j = 0; j < BLOCK; j++) {
            int32_t size = x[j] - offset < 0 ? offset - x[j] : x[j] - offset;
            found = size > found ? size : found;
        }
        while (((int64_t)limit << shift) < found) shift++;
        float scale = power_of_two(127 - shift);
        for (int j = 0; j < BLOCK; j++)
            values[b * BLOCK + j] = (uint8_t)(int32_t)(dither[j] + (float)(x[j] - offset) * scale);
        shifts[b] = (uint8_t)shift;
    }
}

/* Converts packed values of 8 or 4 bits, which have the offset of these bits, back to gradients. */
void decode(const uint8_t *packed, const uint8_t *codes, const uint8_t *shifts, float scale, float *gradient,
            int64_t blocks, int bits) {
    const int largest = (1 << (bits - 1)) - 1, half = BLOCK / 2;
    for (int64_t h = 0; h < 2 * blocks; h++) { /* half a block: with 4 bits its values are all low or all high bits */
        int code = codes[h / 2], power = code + shifts[h / 2] + 127 - BIAS;
        float factor = code == 0 ? 0.0f : code == NON_FINITE ? NAN : power_of_two(power > 255 ? 255 : power);
        float *out = gradient + h * half;
        const uint8_t *from = packed + (bits == 8 || h < blocks ? h : h - blocks) * half;
        factor *= scale;
        if (bits == 8)
            for (int j = 0; j < half; j++) out[j] = (float)((int32_t)from[j] - largest) * factor;
        else if (h < blocks)
            for (int j = 0; j < half; j++) out[j] = (float)((int32_t)(from[j] & 15) - largest) * factor;
        else
            for (int j = 0; j < half; j++) out[j] = (float)((int32_t)(from[j] >> 4) - largest) * factor;
    }
}
