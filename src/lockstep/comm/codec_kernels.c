/* The operations of integer_codec.py on a CPU, each in one pass. They return the same bits as the functions there: see
   Note [Exactness]. Blocks have BLOCK elements; codec_kernels.py compiles this file and calls it. */

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t word __attribute__((aligned(1), may_alias)); /* eight bytes at any address */

#define BLOCK 64
#define NON_FINITE 255
#define CODE_SHIFT 21
#define CODE_OFFSET 363

static float float_of_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float scale_of(int code) { return float_of_bits((code + CODE_OFFSET) << CODE_SHIFT); }

/* What belongs to a block is computed for several blocks at once, which takes a fraction of the time. */
#define TOGETHER 64

/* The rows of the dither table for `count` blocks: `dither_rows`. */
static void dither_rows(const int64_t *numbers, uint32_t key, int64_t rows, uint32_t *found, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t mixed = (uint32_t)numbers[i] * 0x9E3779B1u + key;
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
        mixed = (mixed ^ (mixed >> 16)) * 0xC2B2AE35u;
        found[i] = (mixed ^ (mixed >> 13)) & (uint32_t)(rows - 1);
    }
}

/* By what the rounded sums of `count` blocks are multiplied: `IntegerCodec.factors`. */
static void find_factors(const uint8_t *codes, const uint8_t *shifts, float scale, float *factors, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float multiple = 8.0f / (float)((shifts[i] & 7) + 8) * float_of_bits(((shifts[i] >> 3) + 127) << 23);
        float factor = scale_of(codes[i]) * multiple;
        factor = codes[i] == 0 ? 0.0f : codes[i] == NON_FINITE ? NAN : factor;
        factors[i] = factor * scale;
    }
}

/* The code of each block. The bits of a float without its sign have the order of the values, NaN last. With `more`, the
   maximum with what is in `codes`. */
void block_codes(const int32_t *gradient, uint8_t *codes, int64_t blocks, int bits, int more) {
    float inverse = 1.0f / (float)((1 << (bits - 1)) - 1);
    for (int64_t b = 0; b < blocks; b++) {
        int32_t found = 0, scale;
        for (int j = 0; j < BLOCK; j++) {
            int32_t value = gradient[b * BLOCK + j] & 0x7fffffff;
            found = value > found ? value : found;
        }
        float smallest = float_of_bits(found) * inverse;
        memcpy(&scale, &smallest, sizeof scale);
        int32_t code = ((scale + (1 << CODE_SHIFT) - 1) >> CODE_SHIFT) - CODE_OFFSET;
        code = code < 1 ? 1 : code > NON_FINITE ? NON_FINITE : code;
        code = found == 0 ? 0 : found >= 0x7f800000 ? NON_FINITE : code;
        codes[b] = (uint8_t)(more && codes[b] > code ? codes[b] : code);
    }
}

/* Rounds a gradient. With `more`, adds to `sums`, whose type is INTEGER. */
#define ENCODE(NAME, INTEGER)                                                                                        \
    void NAME(const float *gradient, const uint8_t *codes, const int64_t *numbers, uint32_t key, const float *table, \
              int64_t rows, INTEGER *sums, int64_t blocks, int more) {                                               \
        uint32_t row[TOGETHER];                                                                                      \
        float inverse[TOGETHER];                                                                                     \
        for (int64_t from = 0; from < blocks; from += TOGETHER) {                                                    \
            int64_t count = blocks - from < TOGETHER ? blocks - from : TOGETHER;                                     \
            dither_rows(numbers + from, key, rows, row, count);                                                      \
            for (int64_t i = 0; i < count; i++) inverse[i] = 1.0f / scale_of(codes[from + i]);                       \
            for (int64_t i = 0; i < count; i++) {                                                                    \
                const float *x = gradient + (from + i) * BLOCK, *dither = table + row[i] * BLOCK;                    \
                const float by = codes[from + i] == 0 ? 0.0f : inverse[i];                                           \
                INTEGER *out = sums + (from + i) * BLOCK;                                                            \
                if (codes[from + i] == NON_FINITE)                                                                   \
                    memset(out, 0, BLOCK * sizeof *out);                                                             \
                else if (more)                                                                                       \
                    for (int j = 0; j < BLOCK; j++) out[j] += (INTEGER)(int32_t)(dither[j] + x[j] * by);             \
                else                                                                                                 \
                    for (int j = 0; j < BLOCK; j++) out[j] = (INTEGER)(int32_t)(dither[j] + x[j] * by);              \
            }                                                                                                        \
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

/* Rounds sums of integers with the offset `offset` to `bits` bits, each block with a shift of its own. */
void round_sums(const int16_t *sums, int32_t offset, const int64_t *numbers, uint32_t key, const float *table,
                int64_t rows, uint8_t *values, uint8_t *shifts, int64_t blocks, int bits) {
    int32_t limit = (1 << (bits - 1)) - 1;
    uint32_t row[TOGETHER];
    for (int64_t b = 0; b < blocks; b++) {
        const int16_t *x = sums + b * BLOCK;
        if (b % TOGETHER == 0) dither_rows(numbers + b, key, rows, row, blocks - b < TOGETHER ? blocks - b : TOGETHER);
        const float *dither = table + row[b % TOGETHER] * BLOCK;
        int16_t least = x[0], most = x[0];
        for (int j = 1; j < BLOCK; j++) {
            least = x[j] < least ? x[j] : least;
            most = x[j] > most ? x[j] : most;
        }
        int32_t found = offset - least > most - offset ? offset - least : most - offset, power = 0, eighths = 8;
        while ((limit << power) < found) power++;
        if (power) {
            eighths = (8 * limit << power) / found;
            eighths = eighths > 15 ? 15 : eighths;
        }
        float inverse = (float)eighths * float_of_bits((124 - power) << 23);
        for (int j = 0; j < BLOCK; j++)
            values[b * BLOCK + j] = (uint8_t)(int32_t)(dither[j] + (float)(x[j] - offset) * inverse);
        shifts[b] = (uint8_t)(power << 3 | (eighths - 8));
    }
}

#ifdef __AVX512F__
/* Writes a block past the caches: what is decoded is large, and was not in them. Then nothing has to be read first. */
static void write_block(float *to, const float *block) {
    if ((uintptr_t)to % 64 == 0)
        for (int j = 0; j < BLOCK; j += 16) _mm512_stream_ps(to + j, _mm512_loadu_ps(block + j));
    else
        memcpy(to, block, BLOCK * sizeof *to);
}

static void finish_writes(void) { _mm_sfence(); }
#else
static void write_block(float *to, const float *block) { memcpy(to, block, BLOCK * sizeof *to); }
static void finish_writes(void) {}
#endif

/* Values of 5 bits: four are in the bytes at `low`, shifted by `down`, and one in those at `high`, at place `slice`. */
static inline void decode_few(const uint8_t *restrict low, const uint8_t *restrict high, int down, int slice,
                              float factor, float *restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t value = (uint8_t)((low[i] >> down & 15) | (high[i] >> slice & 1) << 4);
        out[i] = (float)((int32_t)value - 15) * factor;
    }
}

/* Converts packed values of 8 or 5 bits, which have the offset of these bits, back to gradients. */
void decode(const uint8_t *packed, const uint8_t *codes, const uint8_t *shifts, float scale, float *gradient,
            int64_t blocks, int bits) {
    float factors[TOGETHER];
    int slices = bits == 8 ? 1 : 8; /* see PACK */
    int64_t length = blocks * BLOCK / slices;
    for (int slice = 0; slice < slices; slice++) {
        const uint8_t *low = packed + slice % 4 * length, *high = packed + 4 * length;
        const int64_t begin = slice * length, end = begin + length, first = begin / BLOCK;
        for (int64_t b = first; b * BLOCK < end; b++) {
            int64_t i = (b - first) % TOGETHER, left = blocks - b < TOGETHER ? blocks - b : TOGETHER;
            if (i == 0) find_factors(codes + b, shifts + b, scale, factors, left);
            /* the first and the last block of a slice may belong to two of them */
            int64_t at = b == first ? begin : b * BLOCK, until = (b + 1) * BLOCK < end ? (b + 1) * BLOCK : end;
            float block[BLOCK];
            if (bits == 8) {
                for (int j = 0; j < BLOCK; j++) block[j] = (float)((int32_t)packed[at + j] - 127) * factors[i];
                write_block(gradient + at, block);
            } else if (until - at == BLOCK) {
                decode_few(low + at - begin, high + at - begin, slice / 4 * 4, slice, factors[i], block, BLOCK);
                write_block(gradient + at, block);
            } else
                decode_few(low + at - begin, high + at - begin, slice / 4 * 4, slice, factors[i], gradient + at, until - at);
        }
    }
    finish_writes();
}

/* -- differences of weights: delta_codec.py ------------------------------------------------------------------------ */

#define GROUP 16 /* values with the same width */

/* Bit i of byte j of the result is bit j of byte i. */
static uint64_t transpose_bits(uint64_t x) {
    uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAu;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCu;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0u;
    return x ^ t ^ (t << 28);
}

/* The lowest `width` bit planes of GROUP values: bit i of plane k is bit k of value i. */
static void write_planes(const uint32_t *values, int width, uint16_t *planes) {
    for (int byte = 0; 8 * byte < width; byte++) {
        uint64_t low = 0, high = 0;
        for (int i = 0; i < 8; i++) {
            low |= (uint64_t)(values[i] >> (8 * byte) & 255) << (8 * i);
            high |= (uint64_t)(values[i + 8] >> (8 * byte) & 255) << (8 * i);
        }
        low = transpose_bits(low), high = transpose_bits(high);
        for (int j = 0; j < 8 && 8 * byte + j < width; j++)
            planes[8 * byte + j] = (uint16_t)((low >> (8 * j) & 255) | (high >> (8 * j) & 255) << 8);
    }
}

static void read_planes(const uint16_t *planes, int width, uint32_t *values) {
    memset(values, 0, GROUP * sizeof *values);
    for (int byte = 0; 8 * byte < width; byte++) {
        uint64_t low = 0, high = 0;
        for (int j = 0; j < 8 && 8 * byte + j < width; j++) {
            low |= (uint64_t)(planes[8 * byte + j] & 255) << (8 * j);
            high |= (uint64_t)(planes[8 * byte + j] >> 8) << (8 * j);
        }
        low = transpose_bits(low), high = transpose_bits(high);
        for (int i = 0; i < 8; i++) {
            values[i] |= (uint32_t)(low >> (8 * i) & 255) << (8 * byte);
            values[i + 8] |= (uint32_t)(high >> (8 * i) & 255) << (8 * byte);
        }
    }
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)

static void write_planes_fast(const uint32_t *values, int width, uint16_t *planes) {
    __m512i all = _mm512_loadu_si512(values);
    for (int k = 0; k < width; k++)
        planes[k] = (uint16_t)_mm512_movepi32_mask(_mm512_sll_epi32(all, _mm_cvtsi32_si128(31 - k)));
}

static void read_planes_fast(const uint16_t *planes, int width, uint32_t *values) {
    __m512i all = _mm512_setzero_si512();
    for (int k = 0; k < width; k++)
        all = _mm512_mask_or_epi32(all, (__mmask16)planes[k], all, _mm512_set1_epi32((int)(1u << k)));
    _mm512_storeu_si512(values, all);
}
#else
#define write_planes_fast write_planes
#define read_planes_fast read_planes
#endif

/* Writes the width of each group, and its bit planes one after the other. Returns the number of planes. */
#define ENCODE_DELTA(NAME, WRITE)                                                                     \
    int64_t NAME(const uint32_t *old, const uint32_t *new, uint8_t *widths, uint16_t *planes, int64_t numel) { \
        uint16_t *at = planes;                                                                        \
        for (int64_t first = 0; first < numel; first += GROUP) {                                      \
            uint32_t values[GROUP] = {0}, all = 0;                                                    \
            int count = numel - first < GROUP ? (int)(numel - first) : GROUP;                         \
            for (int i = 0; i < count; i++) {                                                         \
                uint32_t delta = new[first + i] - old[first + i];                                     \
                values[i] = delta << 1 ^ (uint32_t)((int32_t)delta >> 31); /* the sign is bit 0 */    \
                all |= values[i];                                                                     \
            }                                                                                         \
            int width = all ? 32 - __builtin_clz(all) : 0;                                            \
            *widths++ = (uint8_t)width;                                                               \
            WRITE(values, width, at);                                                                 \
            at += width;                                                                              \
        }                                                                                             \
        return at - planes;                                                                           \
    }

/* Turns old values into new ones. */
#define DECODE_DELTA(NAME, READ)                                                                      \
    void NAME(uint32_t *values, const uint8_t *widths, const uint16_t *planes, int64_t numel) {       \
        for (int64_t first = 0; first < numel; first += GROUP) {                                      \
            uint32_t found[GROUP];                                                                    \
            int count = numel - first < GROUP ? (int)(numel - first) : GROUP, width = *widths++;      \
            READ(planes, width, found);                                                               \
            planes += width;                                                                          \
            for (int i = 0; i < count; i++) values[first + i] += found[i] >> 1 ^ (0u - (found[i] & 1)); \
        }                                                                                             \
    }

ENCODE_DELTA(encode_delta, write_planes_fast)
ENCODE_DELTA(encode_delta_portable, write_planes)
DECODE_DELTA(decode_delta, read_planes_fast)
DECODE_DELTA(decode_delta_portable, read_planes)
