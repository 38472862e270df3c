/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A profile as a picture: layers upwards, prefix ratio to the right, similarity as shade, the table
 * as a line of steps.
 */

#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvctl/profile.h"

static float similarity(const struct profile *p, unsigned r, unsigned layer) {
        return p->similarity[r * p->layers + layer];
}

/* ---- for terminals --------------------------------------------------------------------------- */

enum { STEP = 2, CELLS = 51 }; /* STEP: percent per cell */

static const struct {
        float least;
        char shade;
} shades[] = {{0.9f, '+'}, {0.8f, '-'}, {0.6f, ':'}, {-2, '.'}};

static char shade_of(const struct profile *p, float value) {
        if (value > p->tau)
                return '#';
        for (size_t i = 0; i < ARRAY_SIZE(shades); i++)
                if (value >= shades[i].least)
                        return shades[i].shade;
        return '?';
}

/* The mean over the ratios of a cell that have samples; false: none has. */
static bool cell_mean(const struct profile *p, unsigned cell, unsigned layer, float *ret) {
        float sum = 0;
        uint32_t n = 0;

        for (unsigned r = cell * STEP; r < MIN((cell + 1) * STEP, PROFILE_RATIOS); r++)
                if (p->samples[r]) {
                        sum += similarity(p, r, layer);
                        n++;
                }
        *ret = n ? sum / (float)n : 0;
        return n > 0;
}

static void draw_row(const struct profile *p, FILE *to, unsigned layer) {
        fprintf(to, "%5u |", layer + 1);
        for (unsigned cell = 0; cell < CELLS; cell++) {
                bool reused = p->depth[MIN(cell * STEP, PROFILE_RATIOS - 1)] > layer;
                float mean;

                if (cell_mean(p, cell, layer, &mean))
                        fputc(reused ? 'O' : shade_of(p, mean), to);
                else
                        fputc(reused ? 'o' : ' ', to);
        }
        fputc('\n', to);
}

char *profile_picture(const struct profile *p) {
        char *lines = NULL;
        size_t size = 0;
        FILE *to = open_memstream(&lines, &size);

        if (!to)
                return NULL;
        fputs("layer\n", to);
        for (unsigned layer = p->layers; layer-- > 0;)
                draw_row(p, to, layer);
        fputs("      +---------------------------------------------------\n"
              "       0         20        40        60        80       100 % of the tokens are the shared prefix\n",
              to);
        fprintf(to,
                "\nO reused (o: without samples), # similarity over %g, + over 0.9, - over 0.8, : over 0.6, . less\n",
                p->tau);
        return fclose(to) == 0 ? lines : NULL;
}

/* ---- as SVG ---------------------------------------------------------------------------------- */

enum { LEFT = 60, TOP = 30, WIDTH = 606, CELL_WIDTH = 6, CELL_HEIGHT = 18 };

/* 0.5 and less is white, 1 is full. */
static unsigned blue_of(float value) {
        float share = MIN(MAX((value - 0.5f) * 2, 0.0f), 1.0f);

        return 255 - (unsigned)(share * 190);
}

static void draw_cells(const struct profile *p, FILE *to) {
        for (unsigned r = 0; r < PROFILE_RATIOS; r++)
                for (unsigned layer = 0; layer < p->layers && p->samples[r]; layer++) {
                        float value = similarity(p, r, layer);

                        fprintf(to,
                                "<rect x='%u' y='%u' width='%u' height='%u' fill='rgb(%u,%u,255)'>"
                                "<title>layer %u, %u %%: %.4f (%u samples)</title></rect>\n",
                                LEFT + r * CELL_WIDTH, TOP + (p->layers - 1 - layer) * CELL_HEIGHT,
                                CELL_WIDTH, CELL_HEIGHT, blue_of(value), blue_of(value), layer + 1,
                                r, (double)value, p->samples[r]);
                }
}

static void draw_steps(const struct profile *p, FILE *to) {
        fputs("<path fill='none' stroke='#c02020' stroke-width='2' d='M", to);
        for (unsigned r = 0; r < PROFILE_RATIOS; r++) {
                unsigned y = TOP + (p->layers - MIN(p->depth[r], p->layers)) * CELL_HEIGHT;

                fprintf(to, "%s%u,%u L%u,%u", r ? " L" : "", LEFT + r * CELL_WIDTH, y,
                        LEFT + (r + 1) * CELL_WIDTH, y);
        }
        fputs("'/>\n", to);
}

static void draw_axes(const struct profile *p, FILE *to) {
        unsigned bottom = TOP + p->layers * CELL_HEIGHT;

        for (unsigned layer = 0; layer < p->layers; layer++)
                fprintf(to, "<text x='%u' y='%u' text-anchor='end'>%u</text>\n", LEFT - 6,
                        TOP + (p->layers - layer) * CELL_HEIGHT - 5, layer + 1);
        for (unsigned r = 0; r <= 100; r += 20)
                fprintf(to, "<text x='%u' y='%u' text-anchor='middle'>%u %%</text>\n",
                        LEFT + r * CELL_WIDTH + 3, bottom + 16, r);
        fprintf(to,
                "<text x='%u' y='%u' text-anchor='middle'>share of the tokens that are the shared prefix</text>\n",
                LEFT + WIDTH / 2, bottom + 34);
        fprintf(to, "<text x='8' y='%u'>layer</text>\n", TOP - 10);
}

void profile_svg(const struct profile *p, FILE *to) {
        fprintf(to,
                "<svg xmlns='http://www.w3.org/2000/svg' width='%u' height='%u' "
                "font-family='sans-serif' font-size='12'>\n"
                "<rect width='100%%' height='100%%' fill='white'/>\n"
                "<text x='%u' y='18'>Similarity of prefix-only to full-input keys and values; "
                "line: layers reused</text>\n",
                LEFT + WIDTH + 20, TOP + p->layers * CELL_HEIGHT + 48, LEFT);
        draw_cells(p, to);
        if (p->def)
                draw_steps(p, to);
        draw_axes(p, to);
        fputs("</svg>\n", to);
}
