/* clang-format off */
/* kvblock/select.h: the launchers that choose tiles, for C, C++, Rust and ctypes: what stands for
 * a piece of queries or keys, what shares of attention tiles have by their pieces, which tiles a row
 * keeps, and lists of them.
 *
 * Of x [members, length, width] each piece of `side` rows in a row becomes its mean, and where that
 * is wanted its largest and its smallest numbers, column by column, in float32; means may be rounded
 * to x's dtype. Rows from ends[i] on do not count; of a piece without rows all is 0. Where a number is NaN, so is what comes of it.
 * Or each of the three is brought to a mean square of 1 over the numbers of a head, and they lie side
 * by side: z / sqrt(max(mean of a head's z^2, 1e-30)).
 *
 * A tile's share is the attention that its pieces of queries pay to its pieces of keys, on average:
 *
 *   score[t, s] = factor scale q[t] . k[s] + distance[class of |s - places[t]|], and first where s
 *                 is the first of the bounds
 *   share[i, j] = the sum over tile j's pieces s of the mean over tile i's pieces t of
 *                 softmax(score[t])[s]
 *
 * over the pieces of keys from bounds[t][0] to before bounds[t][1], as far as there are such, of
 * which, where there are ranges, t sees those whose segments, from the smallest to the largest, meet its own. A piece that
 * sees nothing has no share of anything. Classes of distances are 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to
 * 11, 12 to 15 and so on, two for each power of two; the last one has what is beyond, too. A head has
 * a factor of its own: what vectors were divided by, so that float16 holds them.
 *
 * A row of tiles keeps those that it has to, and of the others the best: as many as there is room
 * for, or, with tau, until what is kept holds so much of the row's mass.
 *
 *   kept[i, j]  = 1    where states[i, j] is KVBLOCK_TILE_ALWAYS
 *               = 1    for the free ones with the highest scores, as many as limits[i] leaves beside
 *                      those, which it does not cut; of equal ones the first, -0 is below 0, and
 *                      NaN below all
 *               = 0    else
 *
 * With tau > 0 scores are masses, those below 0 or NaN are 0, and a row stops at the first tile with
 * which it holds tau times the mass of all that it sees. masses[i] is the share that it holds, 1
 * where there is none.
 *
 * A list has the columns in which a row of a map is not 0, in order, and -1 behind them.
 *
 * Every number is checked before anything is touched. Nothing is allocated and nothing is synchronized;
 * the launches can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_SELECT_H_
#define KVBLOCK_SELECT_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVBLOCK_MOST_COLUMNS = 16384,
  KVBLOCK_MOST_PIECES = 32,     /* of a tile */
  KVBLOCK_MOST_PIECE_DIM = 256, /* that kvblock_weigh_tiles multiplies */
  KVBLOCK_DISTANCES = 32
};

typedef enum kvblock_tile_state {
  KVBLOCK_TILE_HIDDEN = 0, /* the row does not see it */
  KVBLOCK_TILE_FREE = 1,
  KVBLOCK_TILE_ALWAYS = 2,
} kvblock_tile_state;

typedef enum kvblock_pieces_dtype {
  KVBLOCK_PIECES_BF16 = 0,
  KVBLOCK_PIECES_F16 = 1,
  KVBLOCK_PIECES_F32 = 2,
} kvblock_pieces_dtype;

typedef struct kvblock_pool_pieces {
  int32_t dtype;                  /* kvblock_pieces_dtype, of x */
  int32_t side;                   /* rows of a piece, 1 at least */
  int64_t members, length, width; /* width a multiple of what 16 bytes hold, up to 2^24 */
  int64_t pieces;                 /* of a member; those behind its rows are 0 */
  const void* x;                  /* [members, length, width], aligned to 16 bytes */
  const int32_t* ends;            /* [members], or NULL: all rows count */
  void* means;                    /* [members, pieces, width], aligned to 16 bytes, as these two: */
  float* largest;                 /* both or NULL */
  float* smallest;
  int32_t rounded; /* 0: means are float32; 1: of dtype */
  /* 0; or the numbers of a head, 1, 2, 4, 8, 16 or 32 times what 16 bytes of x hold, that divide
   * the width: means are [members, pieces, width / normed, 3, normed] in float32, a head's mean,
   * largest and smallest numbers, each brought to a mean square of 1. largest and smallest are NULL
   * then. */
  int32_t normed;
} kvblock_pool_pieces;

typedef struct kvblock_weigh_tiles {
  int32_t dtype;                    /* of queries and keys: KVBLOCK_PIECES_BF16 or F16 */
  int32_t q_pieces, kv_pieces;      /* of a tile: powers of two up to KVBLOCK_MOST_PIECES */
  float scale;                      /* finite */
  int64_t members, heads, kv_heads; /* kv_heads divides heads */
  int64_t dim;                      /* a multiple of 8, up to KVBLOCK_MOST_PIECE_DIM */
  int64_t rows, columns;            /* tiles of queries and of keys */
  const void* queries;   /* [members, rows * q_pieces, heads, dim], aligned to 16 bytes, as keys */
  const void* keys;      /* [members, columns * kv_pieces, kv_heads, dim] */
  const float* factors;  /* [members, heads], or NULL: 1 */
  const int32_t* bounds; /* [members, rows * q_pieces, 2], aligned to 8 bytes, as ranges */
  const int32_t* q_ranges;  /* [members, rows * q_pieces, 2]; both or NULL */
  const int32_t* kv_ranges; /* [members, columns * kv_pieces, 2] */
  const int32_t* places;    /* [members, rows * q_pieces]; all three or NULL */
  const float* distance;    /* [members, heads, KVBLOCK_DISTANCES] */
  const float* first;       /* [members, heads] */
  float* shares;            /* [members, heads, rows, columns] */
} kvblock_weigh_tiles;

typedef struct kvblock_keep_tiles {
  int64_t rows, columns; /* columns up to KVBLOCK_MOST_COLUMNS; 0 for nothing */
  const float* scores;   /* [rows, columns] */
  const uint8_t* states; /* [rows, columns], kvblock_tile_state */
  const int32_t* limits; /* [rows] */
  uint8_t* kept;         /* [rows, columns] */
  float* masses;         /* [rows], or NULL where tau is 0 */
  float tau;             /* from 0, for none, to 1 */
} kvblock_keep_tiles;

typedef struct kvblock_list_tiles {
  int64_t rows, columns; /* columns up to KVBLOCK_MOST_COLUMNS; 0 rows for nothing */
  int64_t width;         /* entries of a list, 1 at least; what does not fit is left out */
  const uint8_t* map;    /* [rows, columns] */
  int32_t* indices;      /* [rows, width] */
  int32_t* counts;       /* [rows], of those that fit */
} kvblock_list_tiles;

/* Each of these returns NULL on success, else a message that lives until this thread's next call.
 */

/* Check every number, and that what the call needs is there. They look at no array. */
KVBLOCK_EXPORT const char* kvblock_pool_pieces_check(const kvblock_pool_pieces* a);
KVBLOCK_EXPORT const char* kvblock_weigh_tiles_check(const kvblock_weigh_tiles* a);
KVBLOCK_EXPORT const char* kvblock_keep_tiles_check(const kvblock_keep_tiles* a);
KVBLOCK_EXPORT const char* kvblock_list_tiles_check(const kvblock_list_tiles* a);

/* Enqueue the launch on `stream`, a cudaStream_t. */
KVBLOCK_EXPORT const char* kvblock_pool_pieces_cuda(const kvblock_pool_pieces* a, void* stream);
KVBLOCK_EXPORT const char* kvblock_weigh_tiles_cuda(const kvblock_weigh_tiles* a, void* stream);
KVBLOCK_EXPORT const char* kvblock_keep_tiles_cuda(const kvblock_keep_tiles* a, void* stream);
KVBLOCK_EXPORT const char* kvblock_list_tiles_cuda(const kvblock_list_tiles* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_SELECT_H_ */
