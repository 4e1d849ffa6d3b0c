// What dominates a bfloat16 Llama's time on a CPU: matrix products, attention over pages, small operations.
//
// Sums are in float32 and results are rounded to bfloat16 where PyTorch rounds. The sum behind one number is taken in
// one fixed order, whatever else is in the batch: a row has the same bits alone, in a batch or in a longer chunk.
// Everything rests on one micro-kernel, `tile`, which keeps R rows x 2 vectors of sums in registers (Goto and van de
// Geijn 2008). Its right-hand side is a "panel": for each pair of consecutive inputs, two vectors of 32-bit words, each
// both inputs of one column. Where the CPU multiplies such pairs (AVX512-BF16) a word is used as it is; elsewhere it is
// widened to two floats on the way. Called through ctypes by cpu_kernels.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int W = __BIGGEST_ALIGNMENT__ / 4;  // lanes of a vector: 16 with AVX-512, 8 with AVX, else 4
constexpr int MAX_ROWS = W == 8 ? 6 : 12;     // whose sums fit into the registers
constexpr int COLUMNS = 2 * W;                // of a panel
constexpr int CHUNK = 64;                     // keys that attention takes at a time
constexpr int MAX_HEAD_DIM = 256, MAX_UNIT_ROWS = 96;
constexpr int FEW_ROWS = 4;  // of a small operation: not worth waking the other threads for
constexpr float LOWEST = -1e30f;  // score; finite, because the difference of two infinities is not a number
typedef float Floats __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t Word __attribute__((may_alias));
typedef uint16_t Bf16;
#ifdef __AVX512BF16__
#include <immintrin.h>
typedef Bf16 Input;  // a left-hand side as `tile` reads it
#else
typedef float Input;
#endif

static float widen(Bf16 bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
static Bf16 narrow(float value) {  // to nearest, ties to even
    const uint32_t word = __builtin_bit_cast(uint32_t, value);
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
static float rounded(float value) { return widen(narrow(value)); }
static Input to_input(float value) {
    if constexpr (sizeof(Input) == sizeof(Bf16)) return narrow(value);
    else return rounded(value);
}

static float exp2_fast(float x) {  // relative error under 2e-7; 0 below 2^-126, infinite above 2^127
    const float bounded = x > 127.f ? 127.f : x;
    const int32_t whole = int32_t(bounded + (bounded < 0 ? -0.5f : 0.5f));
    const float part = bounded - float(whole);
    const float power = 1.f + part * (0.693147182f + part * (0.240226462f + part * (0.0555032724f + part * (
        0.00961812939f + part * (0.00133981102f + part * 0.000154697872f)))));
    return x < -126.f ? 0.f : x > 127.f ? __builtin_inff() : power * __builtin_bit_cast(float, uint32_t(whole + 127) << 23);
}

// R rows, `stride` inputs apart, times a panel of `pairs` pairs: COLUMNS sums a row, `apart` floats apart, set or added.
template <int R>
static void tile(const Input* rows, long stride, const Words* panel, long pairs, float* out, long apart, bool add) {
    Floats sum[R][2];
    for (int i = 0; i < 2 * R; ++i) sum[i / 2][i % 2] = add ? *(Floats*)(out + i / 2 * apart + i % 2 * W) : Floats{};
    for (long p = 0; p < pairs; ++p) {
        const Words left = panel[2 * p], right = panel[2 * p + 1];
        if (R <= 4) __builtin_prefetch((const char*)(panel + 2 * p) + 1024);
#ifdef __AVX512BF16__
        for (int r = 0; r < R; ++r) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(*(const Word*)(rows + r * stride + 2 * p));
            sum[r][0] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][0], both, (__m512bh)left);
            sum[r][1] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][1], both, (__m512bh)right);
        }
#else
        for (int odd = 0; odd < 2; ++odd) {
            const Floats l = (Floats)(odd ? left & 0xffff0000u : left << 16);
            const Floats m = (Floats)(odd ? right & 0xffff0000u : right << 16);
            for (int r = 0; r < R; ++r) {
                sum[r][0] += rows[r * stride + 2 * p + odd] * l;
                sum[r][1] += rows[r * stride + 2 * p + odd] * m;
            }
        }
#endif
    }
    for (int i = 0; i < 2 * R; ++i) *(Floats*)(out + i / 2 * apart + i % 2 * W) = sum[i / 2][i % 2];
}

template <int R = MAX_ROWS, class... Rest>
static void tile_of(int count, Rest... rest) {  // tile<count>, for 1 <= count <= R
    if (count == R) return tile<R>(rest...);
    if constexpr (R > 1) tile_of<R - 1>(count, rest...);
}

template <class Body>  // body(first row, number of rows): as few tiles as registers allow, as nearly equal as can be
static void for_each_tile(long num_rows, Body body) {
    for (long left = (num_rows + MAX_ROWS - 1) / MAX_ROWS, row = 0, count; left > 0; --left, row += count) {
        count = (num_rows - row) / left;
        body(row, count);
    }
}

// CHUNK keys as panels [CHUNK / COLUMNS][head_dim / 2][2][W]: a transposition of 32-bit words.
static void pack_keys(const Bf16* const* keys, long head_dim, Words* panels) {
    Words halves[2];  // of a perfect shuffle of two vectors
    for (int i = 0; i < COLUMNS; ++i) halves[i / W][i % W] = i / 2 + i % 2 * W;
    for (int group = 0; group < CHUNK / W; ++group)
        for (int word = 0; word < head_dim / 2; word += W) {
            Words now[W], next[W];
            for (int i = 0; i < W; ++i) now[i] = *(const Words*)(keys[group * W + i] + 2 * word);
            for (int step = 1; step < W; step *= 2, std::memcpy(now, next, sizeof now))
                for (int i = 0; i < W; ++i) next[i] = __builtin_shuffle(now[i / 2], now[i / 2 + W / 2], halves[i % 2]);
            for (int i = 0; i < W; ++i) panels[group / 2 * head_dim + 2 * (word + i) + group % 2] = now[i];
        }
}

// Their values as panels [head_dim / COLUMNS][CHUNK / 2][2][W].
static void pack_values(const Bf16* const* values, long head_dim, Words* panels) {
    for (int key = 0; key < CHUNK; key += 2)
        for (int column = 0; column < head_dim; column += COLUMNS) {
            const Bf16 *a = values[key] + column, *b = values[key + 1] + column;
            Word* out = (Word*)(panels + column / COLUMNS * CHUNK + key);
#pragma omp simd
            for (int i = 0; i < COLUMNS; ++i) out[i] = a[i] | uint32_t(b[i]) << 16;
        }
}

// A row of softmax, not yet divided (Milakov and Gimelshein 2018): head_dim sums of weighted values, the largest score, the
// sum of weights. This adds CHUNK scores and makes them weights for `tile`.
static void weigh(float* scores, long num_visible, float scale, float* row, long head_dim, Input* weights) {
    float top = row[head_dim], total = 0;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < CHUNK; ++i) {
        scores[i] = i < num_visible ? scores[i] * scale : LOWEST;
        top = scores[i] > top ? scores[i] : top;
    }
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < CHUNK; ++i) {
        const float power = exp2_fast(scores[i] - top);
        weights[i] = to_input(power);
        total += power;
    }
    const float keep = exp2_fast(row[head_dim] - top);
#pragma omp simd
    for (int i = 0; i < head_dim; ++i) row[i] *= keep;
    row[head_dim] = top;
    row[head_dim + 1] = row[head_dim + 1] * keep + total;
}

static void merge(float* row, const float* other, long head_dim) {
    const float top = std::max(row[head_dim], other[head_dim]);
    const float keep = exp2_fast(row[head_dim] - top), add = exp2_fast(other[head_dim] - top);
#pragma omp simd
    for (int i = 0; i < head_dim + 2; ++i) row[i] = row[i] * keep + other[i] * add;
    row[head_dim] = top;
}

// Consecutive tokens of one sequence and some of their keys. Units that split the keys of the same tokens follow each other.
struct Unit { int64_t seq, first_token, num_tokens, first_position, first_key, end_key, first_row; };
struct Problem {  // filled by cpu_kernels.py, field by field
    const Bf16 *query, *key, *value;
    Bf16 *k_cache, *v_cache, *out;
    const int64_t *slots, *tables;
    const Unit* units;
    float* rows;  // of softmax, row_size apart
    int64_t num_tokens, query_stride, key_stride, value_stride, num_kv_heads, group, head_dim, block_size, table_stride,
        num_units, row_size, num_threads;
    float scale;  // of a score, times log2(e)

    float* row(const Unit& unit, long head, long row) const {
        return rows + (unit.first_row + head * unit.num_tokens * group + row) * row_size;
    }
    void attend(const Unit& unit, long head) const {  // the query heads that share this KV head; pages are read in place
        static const Bf16 zeros[MAX_HEAD_DIM] = {};
        static thread_local Words k_panels[CHUNK / 2 * MAX_HEAD_DIM / W], v_panels[CHUNK / 2 * MAX_HEAD_DIM / W];
        static thread_local Input queries[MAX_UNIT_ROWS * MAX_HEAD_DIM], weights[MAX_ROWS * CHUNK];
        const long num_rows = unit.num_tokens * group, token_size = num_kv_heads * head_dim;
        for (long i = 0; i < num_rows; ++i) {
            const Bf16* from = query + (unit.first_token + i / group) * query_stride + (head * group + i % group) * head_dim;
            for (long k = 0; k < head_dim; ++k) queries[i * head_dim + k] = to_input(widen(from[k]));
            std::fill_n(row(unit, head, i), head_dim + 2, 0.f);
            row(unit, head, i)[head_dim] = LOWEST;
        }
        for (long start = unit.first_key; start < unit.end_key; start += CHUNK) {
            const Bf16 *keys[CHUNK], *values[CHUNK];
            for (long i = 0, at = start; i < CHUNK; ++i, ++at) {
                const bool exists = at < unit.end_key;
                const int64_t* block = tables + unit.seq * table_stride + at / block_size;
                const long offset = exists ? (*block * block_size + at % block_size) * token_size + head * head_dim : 0;
                keys[i] = exists ? k_cache + offset : zeros;
                values[i] = exists ? v_cache + offset : zeros;
            }
            pack_keys(keys, head_dim, k_panels);
            pack_values(values, head_dim, v_panels);
            for_each_tile(num_rows, [&](long first, int count) {
                float scores[MAX_ROWS * CHUNK];
                const long visible = unit.first_position + 1 - start;  // keys of this chunk that the first token sees
                if (visible + (first + count - 1) / group <= 0) return;
                for (int k = 0; k < CHUNK; k += COLUMNS)
                    tile_of(count, queries + first * head_dim, head_dim, k_panels + k / COLUMNS * head_dim, head_dim / 2,
                            scores + k, CHUNK, false);
                for (long r = 0; r < count; ++r)
                    weigh(scores + r * CHUNK, visible + (first + r) / group, scale, row(unit, head, first + r), head_dim,
                          weights + r * CHUNK);
                for (int k = 0; k < head_dim; k += COLUMNS)
                    tile_of(count, weights, CHUNK, v_panels + k / COLUMNS * CHUNK, CHUNK / 2, row(unit, head, first) + k,
                            row_size, true);
            });
        }
    }
    void finish(const Unit& unit, long head) const {
        for (long i = 0; i < unit.num_tokens * group; ++i) {
            float* sums = row(unit, head, i);
            for (const Unit* next = &unit + 1; next < units + num_units && next->first_key > 0; ++next)
                merge(sums, row(*next, head, i), head_dim);
            Bf16* to = out + (((unit.first_token + i / group) * num_kv_heads + head) * group + i % group) * head_dim;
#pragma omp simd
            for (long k = 0; k < head_dim; ++k) to[k] = narrow(sums[k] / sums[head_dim + 1]);
        }
    }
};

extern "C" {
int vector_lanes() { return W; }
int input_bytes() { return sizeof(Input); }

void paged_attention(const Problem* problem) {  // stores K and V of all tokens, then attends
    const Problem& p = *problem;
    const long token_size = p.num_kv_heads * p.head_dim, num_tasks = p.num_units * p.num_kv_heads;
#pragma omp parallel num_threads(p.num_threads)
    {
#pragma omp for schedule(static)
        for (long token = 0; token < p.num_tokens; ++token) {
            std::memcpy(p.k_cache + p.slots[token] * token_size, p.key + token * p.key_stride, 2 * token_size);
            std::memcpy(p.v_cache + p.slots[token] * token_size, p.value + token * p.value_stride, 2 * token_size);
        }
#pragma omp for schedule(dynamic)
        for (long i = num_tasks - 1; i >= 0; --i) p.attend(p.units[i / p.num_kv_heads], i % p.num_kv_heads);
#pragma omp for schedule(static)
        for (long i = 0; i < num_tasks; ++i)
            if (p.units[i / p.num_kv_heads].first_key == 0) p.finish(p.units[i / p.num_kv_heads], i % p.num_kv_heads);
    }
}

// out [num_rows, num_columns] = x [num_rows, num_inputs] times packed panels.
void linear(const Input* x, long num_rows, long num_inputs, const Words* panels, long num_columns, Bf16* out,
            int num_threads) {
    constexpr long CHUNK_ROWS = 8 * MAX_ROWS;  // which stay in the cache while the panels pass
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads)
    for (long start = 0; start < num_rows; start += CHUNK_ROWS)
        for (long column = 0; column < num_columns; column += COLUMNS)
            for_each_tile(std::min(CHUNK_ROWS, num_rows - start), [&](long first, int count) {
                float sums[MAX_ROWS * COLUMNS];
                tile_of(count, x + (start + first) * num_inputs, num_inputs, panels + column / COLUMNS * num_inputs,
                        num_inputs / 2, sums, COLUMNS, false);
                for (int r = 0; r < count; ++r)
#pragma omp simd
                    for (int i = 0; i < std::min<long>(COLUMNS, num_columns - column); ++i)
                        out[(start + first + r) * num_columns + column + i] = narrow(sums[r * COLUMNS + i]);
            });
}

// out = weight * x / sqrt(mean(x^2) + eps) by rows of `size`, rounded before the weight is applied.
void rms_norm(const Bf16* x, const Bf16* weight, float eps, long num_rows, long size, Bf16* out, int num_threads) {
#pragma omp parallel for if (num_rows > FEW_ROWS) num_threads(num_threads)
    for (long row = 0; row < num_rows; ++row) {
        const Bf16* from = x + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < size; ++i) squares += widen(from[i]) * widen(from[i]);
        const float factor = 1.f / __builtin_sqrtf(squares / size + eps);
#pragma omp simd
        for (long i = 0; i < size; ++i) out[row * size + i] = narrow(widen(weight[i]) * rounded(widen(from[i]) * factor));
    }
}

// In place on [num_tokens, num_heads, head_dim], `stride` between tokens; cos and sin [num_tokens, head_dim].
void rotary(Bf16* x, long stride, long num_tokens, long num_heads, long head_dim, const Bf16* cos, const Bf16* sin,
            int num_threads) {
    const long half = head_dim / 2;
#pragma omp parallel for if (num_tokens > FEW_ROWS) num_threads(num_threads)
    for (long row = 0; row < num_tokens * num_heads; ++row) {
        Bf16* head = x + row / num_heads * stride + row % num_heads * head_dim;
        const Bf16 *c = cos + row / num_heads * head_dim, *s = sin + row / num_heads * head_dim;
#pragma omp simd
        for (long i = 0; i < half; ++i) {
            const float a = widen(head[i]), b = widen(head[half + i]);
            head[i] = narrow(rounded(a * widen(c[i])) - rounded(b * widen(s[i])));
            head[half + i] = narrow(rounded(b * widen(c[i])) + rounded(a * widen(s[i])));
        }
    }
}

// out [num_rows, size] = silu(gate) * up, both halves of a row of gate_up [num_rows, 2 * size].
void silu_and_mul(const Bf16* gate_up, long num_rows, long size, Bf16* out, int num_threads) {
#pragma omp parallel for if (num_rows > FEW_ROWS) num_threads(num_threads)
    for (long row = 0; row < num_rows; ++row) {
        const Bf16 *gates = gate_up + row * 2 * size, *ups = gates + size;
#pragma omp simd
        for (long i = 0; i < size; ++i) {
            const float gate = widen(gates[i]);
            out[row * size + i] = narrow(rounded(gate / (1.f + exp2_fast(gate * -1.44269504f))) * widen(ups[i]));
        }
    }
}
}
