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

/* Gradients are read once, in order, and are not in the caches. They are prefetched so many elements ahead, because the
   prefetcher of the processor stops at the end of a page of 4 KiB. */
#define PREFETCH_AHEAD 2048

static inline void prefetch_block(const void *block) {
    for (int line = 0; line < BLOCK * 4; line += 64) __builtin_prefetch((const float *)block + PREFETCH_AHEAD + line / 4, 0, 3);
}

/* The code of each block: the largest that one of the shards needs, which are `stride` elements apart. The bits of a
   float without its sign have the order of the values, NaN last. */
void block_codes(const int32_t *gradient, int64_t stride, int shards, uint8_t *codes, int64_t blocks, int bits) {
    float inverse = 1.0f / (float)((1 << (bits - 1)) - 1);
    for (int shard = 0; shard < shards; shard++) {
        const int32_t *x = gradient + shard * stride;
        for (int64_t b = 0; b < blocks; b++, x += BLOCK) {
            int32_t found = 0, scale;
            prefetch_block(x);
            for (int j = 0; j < BLOCK; j++) {
                int32_t value = x[j] & 0x7fffffff;
                found = value > found ? value : found;
            }
            float smallest = float_of_bits(found) * inverse;
            memcpy(&scale, &smallest, sizeof scale);
            int32_t code = ((scale + (1 << CODE_SHIFT) - 1) >> CODE_SHIFT) - CODE_OFFSET;
            code = code < 1 ? 1 : code > NON_FINITE ? NON_FINITE : code;
            code = found == 0 ? 0 : found >= 0x7f800000 ? NON_FINITE : code;
            codes[b] = (uint8_t)(shard && codes[b] > code ? codes[b] : code);
        }
    }
}

/* Packed values consist of planes: the low bytes, if there are more than 8 bits, and then 4, 2 and 1 bits of each value,
   8 / width values to a byte, which are far apart. So the functions below go over the values in slices in which the
   place of every plane is fixed, a tile of one slice at a time, which stays in the nearest cache from one packed form to
   the next. Bytes are shifted eight at a time: nothing is shifted out of a byte
   that its mask would keep.

   A section has a multiple of 8 blocks, so every slice has whole blocks. */
#define TILE_BLOCKS 16
#define TILE_NUMEL (TILE_BLOCKS * BLOCK)

static int slices_of(int bits) { return bits % 8 == 0 ? 1 : bits & 1 ? 8 : bits & 2 ? 4 : 2; }

static int most(int a, int b) { return a > b ? a : b; }

static uint64_t in_each_byte(int width) { return (uint64_t)((1 << width) - 1) * 0x0101010101010101u; }

/* A tile of a section of `numel` values: `count` of them, beginning with value `from` of a slice. */
struct tile {
    int64_t numel, from, count;
    int slice, slices;
};

/* Returns the offset of a tile's bytes in a plane of `width` bits, and in `place` the place of its bits in each byte. */
static inline int64_t byte_of(const struct tile at, int width, int *place) {
    int together = at.slices / (8 / width);
    *place = at.slice / together * width;
    return at.slice % together * (at.numel / at.slices) + at.from;
}

static inline void pack_tile(const int16_t *values, uint8_t *packed, const struct tile at, int bits) {
    uint64_t cut[TILE_NUMEL / 8];
    uint8_t *bytes = (uint8_t *)cut;
    int shift = 0, place;
    if (bits >= 8) {
        uint8_t *out = packed + byte_of(at, 8, &place);
        for (int64_t i = 0; i < at.count; i++) out[i] = (uint8_t)values[i];
        packed += at.numel, shift = 8;
    }
    for (int width = 4; width; width /= 2) {
        if (!(bits % 8 & width)) continue;
        word *out = (word *)(packed + byte_of(at, width, &place));
        uint64_t mask = in_each_byte(width);
        for (int64_t i = 0; i < at.count; i++) bytes[i] = (uint8_t)((uint16_t)values[i] >> shift);
        if (place)
            for (int64_t i = 0; i < at.count / 8; i++) out[i] |= (cut[i] & mask) << place;
        else
            for (int64_t i = 0; i < at.count / 8; i++) out[i] = cut[i] & mask;
        packed += at.numel * width / 8, shift += width;
    }
}

/* The inverse of `pack_tile`; with `add`, adds to `values`. */
static inline void unpack_tile(const uint8_t *packed, int16_t *values, const struct tile at, int bits, int add) {
    uint64_t cut[TILE_NUMEL / 8];
    const uint8_t *bytes = (const uint8_t *)cut;
    int shift = 0, place;
    if (bits >= 8) {
        const uint8_t *x = packed + byte_of(at, 8, &place);
        if (add)
            for (int64_t i = 0; i < at.count; i++) values[i] += x[i];
        else
            for (int64_t i = 0; i < at.count; i++) values[i] = x[i];
        packed += at.numel, shift = 8, add = 1;
    }
    for (int width = 4; width; width /= 2) {
        if (!(bits % 8 & width)) continue;
        const word *x = (const word *)(packed + byte_of(at, width, &place));
        uint64_t mask = in_each_byte(width);
        int16_t factor = (int16_t)(1 << shift);
        for (int64_t i = 0; i < at.count / 8; i++) cut[i] = (x[i] >> place) & mask;
        if (add)
            for (int64_t i = 0; i < at.count; i++) values[i] = (int16_t)(values[i] + bytes[i] * factor);
        else
            for (int64_t i = 0; i < at.count; i++) values[i] = (int16_t)(bytes[i] * factor);
        packed += at.numel * width / 8, shift += width, add = 1;
    }
}

/* Goes over the tiles of a section; of those that share bytes, the one with the lowest bits comes first. `first` is the
   number of a tile's first block, `count` the number of its blocks. */
#define FOR_EACH_TILE(BLOCKS, SLICES)                                                                              \
    for (int64_t length = (BLOCKS) / (SLICES), begin = 0; begin < length; begin += TILE_BLOCKS)                    \
        for (int64_t slice = 0, first = begin, count = length - begin < TILE_BLOCKS ? length - begin : TILE_BLOCKS; \
             slice < (SLICES); slice++, first += length)

#define TILE(BLOCKS, SLICES) \
    (struct tile) { (BLOCKS) * BLOCK, begin * BLOCK, count * BLOCK, (int)slice, (SLICES) }

/* Rounds `count` blocks of a gradient; with `add`, adds to `sums`. */
static void encode_tile(const float *gradient, const uint8_t *codes, const int64_t *numbers, uint32_t key,
                       const float *table, int64_t rows, int16_t *sums, int64_t count, int add) {
    uint32_t row[TILE_BLOCKS];
    float inverse[TILE_BLOCKS];
    dither_rows(numbers, key, rows, row, count);
    for (int64_t i = 0; i < count; i++) inverse[i] = codes[i] == 0 ? 0.0f : 1.0f / scale_of(codes[i]);
    for (int64_t i = 0; i < count; i++) {
        const float *x = gradient + i * BLOCK, *dither = table + row[i] * BLOCK, by = inverse[i];
        int16_t *out = sums + i * BLOCK;
        prefetch_block(x);
        if (codes[i] == NON_FINITE)
            memset(out, 0, BLOCK * sizeof *out);
        else if (add)
            for (int j = 0; j < BLOCK; j++) out[j] = (int16_t)(out[j] + (int32_t)(dither[j] + x[j] * by));
        else
            for (int j = 0; j < BLOCK; j++) out[j] = (int16_t)(int32_t)(dither[j] + x[j] * by);
    }
}

/* Rounds the shards of a gradient, each with its key, and packs their sums: `blocks` in each section, whose packed forms
   are `out_stride` bytes apart. Without shards they are 0. */
void encode(const float *gradient, int64_t stride, int shards, const uint8_t *codes, const int64_t *numbers,
            const uint32_t *keys, const float *table, int64_t rows, uint8_t *out, int64_t out_stride, int sections,
            int64_t blocks, int bits) {
    int16_t sums[TILE_NUMEL] = {0};
    int slices = slices_of(bits);
    for (int section = 0; section < sections; section++) {
        FOR_EACH_TILE(blocks, slices) {
            for (int shard = 0; shard < shards; shard++)
                encode_tile(gradient + shard * stride + first * BLOCK, codes + first, numbers + first, keys[shard], table,
                           rows, sums, count, shard > 0);
            pack_tile(sums, out, TILE(blocks, slices), bits);
        }
        gradient += blocks * BLOCK, codes += blocks, numbers += blocks, out += out_stride;
    }
}

/* Adds packed rows. Each has `sections` of `blocks`, `stride` bytes apart. */
void add_packed(const uint8_t *const *packed, int rows, int64_t stride, int bits, uint8_t *out, int64_t out_stride,
                int out_bits, int sections, int64_t blocks) {
    int16_t sums[TILE_NUMEL];
    int slices = most(slices_of(bits), slices_of(out_bits));
    for (int section = 0; section < sections; section++)
        FOR_EACH_TILE(blocks, slices) {
            for (int n = 0; n < rows; n++)
                unpack_tile(packed[n] + section * stride, sums, TILE(blocks, slices), bits, n > 0);
            pack_tile(sums, out + section * out_stride, TILE(blocks, slices), out_bits);
        }
}

/* The largest distance of the values of a block from `offset`. */
static int32_t largest_distance(const int16_t *x, int32_t offset) {
    int16_t least = x[0], most = x[0];
    for (int j = 1; j < BLOCK; j++) {
        least = x[j] < least ? x[j] : least;
        most = x[j] > most ? x[j] : most;
    }
    return offset - least > most - offset ? offset - least : most - offset;
}

/* The shifts of `count` blocks, and by what their values are multiplied, from the largest value of each. */
static void find_shifts(const int32_t *largest, int bits, uint8_t *shifts, float *factors, int64_t count) {
    const int32_t limit = (1 << (bits - 1)) - 1;
    for (int64_t i = 0; i < count; i++) {
        int32_t power = 0;
        for (int p = 0; p < 16; p++) power += (limit << p) < largest[i];
        /* The quotient of two small integers, rounded to a float, is below the next integer if it is exactly. */
        int32_t eighths = (int32_t)((float)(8 * limit << power) / (float)(largest[i] > 1 ? largest[i] : 1));
        eighths = power == 0 ? 8 : eighths > 15 ? 15 : eighths;
        factors[i] = (float)eighths * float_of_bits((124 - power) << 23);
        shifts[i] = (uint8_t)(power << 3 | (eighths - 8));
    }
}

/* Adds packed rows of sums, which then have the offset `offset`, rounds them to `bits` bits, and packs them. */
void round_packed(const uint8_t *const *packed, int rows, int packed_bits, int32_t offset, const int64_t *numbers,
                  uint32_t key, const float *table, int64_t table_rows, uint8_t *out, uint8_t *shifts, int64_t blocks,
                  int bits) {
    int16_t sums[TILE_NUMEL];
    uint32_t row[TILE_BLOCKS];
    int32_t largest[TILE_BLOCKS];
    float factors[TILE_BLOCKS];
    int slices = most(slices_of(packed_bits), slices_of(bits));
    FOR_EACH_TILE(blocks, slices) {
        for (int n = 0; n < rows; n++) unpack_tile(packed[n], sums, TILE(blocks, slices), packed_bits, n > 0);
        dither_rows(numbers + first, key, table_rows, row, count);
        for (int64_t i = 0; i < count; i++) largest[i] = largest_distance(sums + i * BLOCK, offset);
        find_shifts(largest, bits, shifts + first, factors, count);
        for (int64_t i = 0; i < count; i++) {
            int16_t *x = sums + i * BLOCK;
            const float *dither = table + row[i] * BLOCK;
            for (int j = 0; j < BLOCK; j++) x[j] = (int16_t)(int32_t)(dither[j] + (float)(x[j] - offset) * factors[i]);
        }
        pack_tile(sums, out, TILE(blocks, slices), bits);
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

/* Values of 8 bits, or of 5: four are in the bytes at `low`, at place `down`, and one in those at `high`. */
static inline void decode_block(const uint8_t *restrict low, const uint8_t *restrict high, int down, int slice, int bits,
                                float factor, float *restrict out) {
    if (bits == 8)
        for (int j = 0; j < BLOCK; j++) out[j] = (float)((int32_t)low[j] - 127) * factor;
    else
        for (int j = 0; j < BLOCK; j++) {
            uint8_t value = (uint8_t)((low[j] >> down & 15) | (high[j] >> slice & 1) << 4);
            out[j] = (float)((int32_t)value - 15) * factor;
        }
}

/* Converts packed values of 8 or 5 bits, which have the offset of these bits, back to gradients. Each section has `blocks`,
   and their shifts behind the values. */
void decode(const uint8_t *const *packed, int sections, const uint8_t *codes, float scale, float *gradient, int64_t blocks,
            int bits) {
    float factors[TILE_BLOCKS], block[BLOCK];
    int slices = slices_of(bits);
    for (int section = 0; section < sections; section++) {
        const uint8_t *values = packed[section], *shifts = values + blocks * BLOCK * bits / 8;
        const uint8_t *high = values + blocks * BLOCK / 2; /* of 5 bits */
        FOR_EACH_TILE(blocks, slices) {
            int place = 0;
            const uint8_t *low = values + byte_of(TILE(blocks, slices), bits == 8 ? 8 : 4, &place);
            find_factors(codes + first, shifts + first, scale, factors, count);
            for (int64_t i = 0; i < count; i++) {
                const uint8_t *bit = high + (begin + i) * BLOCK;
                decode_block(low + i * BLOCK, bit, place, (int)slice, bits, factors[i], block);
                write_block(gradient + (first + i) * BLOCK, block);
            }
        }
        codes += blocks, gradient += blocks * BLOCK;
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
